"""Lay out the pages of the docs site in build/pages: the documents, and an API reference of the docstrings.

    python docs/site.py && mkdocs build     # `make docs`; then python -m http.server -d build/site

The pages keep their paths in the repository, so that every relative link holds. Needs nothing but Python.
"""

import ast
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
COPIED = ("*.md", "LICENSE", "docs/**/*", "bench/*", "examples/*.py", "src/bertsmith/pretrained/*/card.md")
STYLE = ".md-grid { max-width: 76rem } .md-typeset pre > code { font-size: 0.78em }"
"""Wide enough for the drawings and printed outputs."""
PACKAGES = sorted(path.parent for path in (ROOT / "src" / "bertsmith").glob("*/__init__.py"))


def main() -> None:
    """Write all pages anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for pattern in COPIED:
        for file in ROOT.glob(pattern):
            if file.is_file() and "__pycache__" not in file.parts:
                place = PAGES / file.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
    write(PAGES / "site.css", STYLE)
    write(PAGES / "api" / "README.md", public_page())
    for package in PACKAGES:
        write(PAGES / "api" / f"{package.name}.md", package_page(package))


def write(page: Path, text: str) -> None:
    """Write a page into its folder."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")


def public_page() -> str:
    """Return the page of the public names of `bertsmith`, with a list of the packages."""
    tree = ast.parse((ROOT / "src" / "bertsmith" / "__init__.py").read_text(encoding="utf-8"))
    homes = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES"
    )
    listed = " · ".join(f"[{package.name}]({package.name}.md)" for package in PACKAGES)
    names = "\n\n".join(f"::: {home}.{name}" for name, home in homes.items())
    intro = "`import bertsmith` has these names; each is `bertsmith.NAME`, without the module below it."
    return f"# API reference\n\n{intro}\n\nAll packages: {listed}.\n\n{names}\n"


def package_page(package: Path) -> str:
    """Return the page of a package: each of its modules, public names first of all."""
    modules = sorted(
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for path in package.rglob("*.py")
        if path.name != "__init__.py"
    )
    parts = "\n\n".join(f"::: {name}\n    options: {{show_root_full_path: true}}" for name in modules)
    return f"# {package.name}\n\n{parts}\n"


if __name__ == "__main__":
    main()
