"""Whether all can read a page: the contrast of each piece of text with what lies behind it, and axe-core."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

CONTRASTS = """root => {
    const brush = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const painted = new Map();
    function paint(...colours) {  // on top of each other, as the browser itself mixes them
        const key = colours.join("/");
        if (painted.has(key)) return painted.get(key);
        brush.clearRect(0, 0, 1, 1);
        for (const colour of colours) {
            brush.fillStyle = colour;
            brush.fillRect(0, 0, 1, 1);
        }
        painted.set(key, [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3));
        return painted.get(key);
    }
    const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    function luminance(colour) {
        const [red, green, blue] = colour.map((value) => linear(value / 255));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    }
    function grounds(element) {
        const above = element.parentElement ? grounds(element.parentElement) : ["white"];
        return [...above, getComputedStyle(element).backgroundColor];
    }
    function ratio(element) {
        const behind = grounds(element);
        const ink = luminance(paint(...behind, getComputedStyle(element).color));
        const ground = luminance(paint(...behind));
        return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    }
    const texts = document.createTreeWalker(document.querySelector(root), NodeFilter.SHOW_TEXT);
    const found = [];
    while (texts.nextNode()) {
        const element = texts.currentNode.parentElement;
        const text = texts.currentNode.data.trim();
        const seen = element.checkVisibility() && !element.closest(".unseen, svg");
        if (text && seen) found.push([text, ratio(element)]);
    }
    return found;
}"""
AXE = Axe()
RUN = "([root, options]) => axe.run(root === 'html' ? document : root, options).then((all) => all.violations)"
READABLE = 4.5
"""The least contrast of ordinary text in WCAG 2, level AA."""


def unreadable(page: Page, root: str) -> dict[str, float]:
    """The visible pieces of text below `root` that are too faint, with their contrasts."""
    found = page.evaluate(CONTRASTS, root)
    assert found, f"there is no text in {root}"
    return {text: round(ratio, 2) for text, ratio in found if ratio < READABLE}


def violations(page: Page, *, root: str = "html", colours_alone: bool = False) -> list[str]:
    """The rules of axe-core that the page breaks at or below `root`, each with the elements that do."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.axe_script)
    # Loaded beforehand would be what sounds and what style sheets turn: no page here does either.
    options = {"resultTypes": ["violations"], "preload": False}
    options |= {"runOnly": ["color-contrast"]} if colours_alone else {}
    found = page.evaluate(RUN, [root, options])
    return [f"{each['id']}: {[node['target'] for node in each['nodes']]}" for each in found]
