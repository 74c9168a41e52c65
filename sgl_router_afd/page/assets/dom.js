// Makes and patches nodes. Text goes in as text alone, and a node changes only where its content did.

const SVG = "http://www.w3.org/2000/svg";

/** A node with attributes and children; a string child becomes text. */
function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function setHidden(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

/** A shape and a word, so that no state is told by colour alone. */
function makeState() {
  const use = draw("use");
  const word = make("span");
  const shape = draw("svg", { class: "shape", "aria-hidden": "true" }, use);
  const node = make("span", { class: "state" }, shape, word);
  return {
    node,
    update(state) {
      const look = lookOf(state);
      setAttribute(use, "href", `#shape-${look.shape}`);
      setText(word, look.word);
    },
  };
}

/** Keeps a parent's children in step with items: made once for a key, updated, moved, removed. */
function makeList(parent, makeItem) {
  const shown = new Map();
  return {
    parts: shown,
    update(items, keyOf, context) {
      const keys = new Set();
      let before = null;
      for (const item of items) {
        const key = keyOf(item);
        if (keys.has(key)) continue;
        keys.add(key);
        if (!shown.has(key)) shown.set(key, makeItem(item));
        const part = shown.get(key);
        part.update(item, context);
        const place = before ? before.nextSibling : parent.firstChild;
        if (place !== part.node) parent.insertBefore(part.node, place);
        before = part.node;
      }
      for (const [key, part] of shown) {
        if (keys.has(key)) continue;
        part.node.remove();
        shown.delete(key);
      }
    },
  };
}
