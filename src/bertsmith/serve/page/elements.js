// Making elements. Text only ever becomes a text node, and styles only classes and custom properties, so the
// page needs neither innerHTML nor the style attribute that its Content-Security-Policy refuses.

const SVG = "http://www.w3.org/2000/svg";
const [DARK_TURNS, LIGHT_TURNS] = [0.56, 0.84]; // heats from which black ink reads better, and white

/** An HTML element: functions become listeners, true and false set or leave out an attribute. */
export function make(name, attributes = {}, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

/** An SVG element. */
export function draw(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

/** The same element with a number as a custom property, for style sheets to use. */
export function withNumber(element, property, value) {
  element.style.setProperty(property, String(value));
  return element;
}

/** The same element, as warm as this number from 0 to 1; style sheets give it a readable ink. */
export function heated(element, heat) {
  element.classList.add("heated");
  // Where the shade meets black and white ink half-way differs between the themes.
  element.classList.toggle("warm", heat > DARK_TURNS);
  element.classList.toggle("hot", heat > LIGHT_TURNS);
  return withNumber(element, "--heat", heat.toFixed(3));
}

/** Someone's words inside of ours: whichever way they are written, they do not turn what stands around them. */
export function quoted(text) {
  return make("bdi", {}, text);
}

function furnish(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A labelled text field of one line, or of several that grow with their text. */
export function field(label, { lines = 1, value = "", ...attributes } = {}) {
  const box = make(lines > 1 ? "textarea" : "input", {
    autocomplete: "off",
    spellcheck: "false",
    dir: "auto",
    ...attributes,
  });
  if (lines > 1) box.rows = lines;
  box.value = value;
  return { box, root: make("label", { class: "field" }, make("span", { class: "label" }, label), box) };
}

/** A labelled choice among [value, text] pairs. */
export function choice(label, options, attributes = {}) {
  const box = make("select", attributes);
  box.append(...options.map(([value, text]) => make("option", { value }, text)));
  return { box, root: make("label", { class: "field inline" }, make("span", { class: "label" }, label), box) };
}

/** A share of one as people write it. */
export function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  if (share > 0.999 && share < 1) return "> 99.9 %";
  const digits = share < 0.0995 || (share > 0.99 && share < 1) ? 1 : 0;
  return `${(100 * share).toFixed(digits)} %`;
}

/** Makes one of several elements reachable by Tab, and the arrow keys walk among them; returns the wanderer. */
export function walkable(elements, { columns = 1 } = {}) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  const turned = { ArrowRight: "ArrowLeft", ArrowLeft: "ArrowRight" }; // where lines run from right to left
  const reach = (wanted) => elements.forEach((element, place) => (element.tabIndex = place === wanted ? 0 : -1));
  elements.forEach((element, place) =>
    element.addEventListener("keydown", (event) => {
      const aims = { Home: 0, End: elements.length - 1 };
      const leftward = event.key in turned && getComputedStyle(element).direction === "rtl";
      const key = leftward ? turned[event.key] : event.key;
      const aim = key in steps ? place + steps[key] : aims[key];
      if (aim === undefined) return;
      event.preventDefault();
      if (!elements[aim]) return;
      reach(aim);
      elements[aim].focus();
    }),
  );
  reach(0);
  return reach;
}
