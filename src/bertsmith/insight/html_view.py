"""Views, each a single HTML file with its script, style and data, usable without a server or a network.

A view uses the parts of the playground (`serve/page`), so that it looks and behaves alike. Its additional
parts are in `insight/page`.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.files import write_text

_FOLDERS = (files("bertsmith.insight") / "page", files("bertsmith.serve") / "page")
_STYLE = re.compile(r'<link rel="stylesheet" href="page/(\w+\.css)">')
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z_]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|const|class) (\w+)", re.MULTILINE)
# A canvas does not follow a style sheet. In the playground, the theme button sends this event.
_FOLLOW_SYSTEM = """matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  document.dispatchEvent(new CustomEvent("themechange")),
);
"""


def write_view(out: Path, script: str, data: dict[str, Any], *, title: str) -> None:
    """Write a view, a page that the script's `show(root, data)` fills."""
    write_text(out, page_text(script, data, title=title))


def page_text(script: str, data: dict[str, Any], *, title: str) -> str:
    """Return the text of the whole page."""
    style = "\n".join(_text(name) for name in (*_STYLE.findall(_text("page.html")), "view.css"))
    code = f'"use strict";\n{bundled(script)}'
    given = "document.querySelector('main'), JSON.parse(document.querySelector('#data').text)"
    code += f"{_FOLLOW_SYSTEM}{_module(script)}.show({given});\n"
    # Escaped so that a text cannot end the script element that contains it.
    held = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    allowed = f"script-src {_hash(code)}; style-src {_hash(style)}; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<main class="view" id="view"><h1>{escape(title)}</h1></main>\n'
        f'<script type="application/json" id="data">{held}</script>\n'
        f"<script>{code}</script>\n</body>\n</html>\n"
    )


def bundled(script: str) -> str:
    """Return a script and its imports, each module as an object of its exports, in order of dependency."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        text = _text(f"{name}.js")
        for _, other in _IMPORT.findall(text):
            add(other)
        exported = _EXPORT.findall(text)
        body = _IMPORT.sub(lambda found: _taken(found[1], found[2]), text)
        body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
        given = ", ".join(exported)
        done[name] = f"const {_module(name)} = (() => {{\n{body}\nreturn {{ {given} }};\n}})();\n"

    add(script)
    return "".join(done.values())


def _taken(names: str, module: str) -> str:
    """Return an import as a destructuring assignment; `a as b` becomes `a: b`."""
    return f"const {{{names.replace(' as ', ': ')}}} = {_module(module)};\n"


def _module(name: str) -> str:
    """Return the variable of a module, with a suffix because a module may export its own name."""
    return f"{name}_module"


def _text(name: str) -> str:
    own, shared = (folder / name for folder in _FOLDERS)
    return (own if own.is_file() else shared).read_text("utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def packed_bytes(values: NDArray[np.uint8]) -> str:
    """Return bytes in the form that a page reads: compressed, in base 64."""
    return base64.b64encode(zlib.compress(values.tobytes(), 6)).decode()


def rounded(values: Iterable[float], digits: int = 4) -> list[float]:
    """Round numbers, so that the page is small."""
    return [round(float(each), digits) for each in values]
