// One group as a picture: attention servers left, MLP servers right, lines for who is attached to whom.

const MANY_SERVERS = 12;
const MANY_LINES = 48;
const WIRE_HEIGHT = 19; // of a line's end, below the top of its card

function makeGroup() {
  const name = make("h2");
  const state = makeState();
  const facts = make("p", { class: "facts" });
  const why = make("p", { class: "group-why" });
  const attnTitle = make("h3", { class: "of-attn" });
  const mlpTitle = make("h3", { class: "of-mlp" });
  const attnNode = make("ul", { class: "servers" });
  const mlpNode = make("ul", { class: "servers mlp" });
  const wires = draw("svg", { class: "wires", role: "img" });
  const picture = make("div", { class: "picture" }, attnTitle, mlpTitle, attnNode, mlpNode, wires);
  const node = make("section", { class: "group" },
    make("div", { class: "group-head" }, name, state.node, facts), why, picture, makeLegend());
  const attn = makeList(attnNode, makeServer);
  const mlp = makeList(mlpNode, makeServer);
  let lines = [];
  const redraw = () => drawWires(wires, lines, attn.parts, mlp.parts);
  new ResizeObserver(redraw).observe(picture);
  return {
    node,
    update(group, answer) {
      setText(name, group.name);
      state.update(group.state);
      setAttribute(node, "data-tone", lookOf(group.state).tone);
      setAttribute(node, "data-state", group.state);
      setAttribute(node, "data-group", group.name);
      const models = group.models.length ? `serves ${group.models.join(", ")}` : "serves no model yet";
      setText(facts, `${models}; epoch ${group.epoch}`);
      setText(why, group.reason);
      const [left, right] = [attnSide(group), mlpSide(group, answer)];
      setText(attnTitle, counted(group.attn.length, "attention server", "attention servers"));
      setText(mlpTitle, counted(group.mlp.length, "MLP server", "MLP servers"));
      attn.update(left, cardKey, { answer, isCompact: left.length > MANY_SERVERS });
      mlp.update(right, cardKey, { answer, isCompact: right.length > MANY_SERVERS });
      lines = linesOf(group.attn, right);
      wires.classList.toggle("dense", lines.length > MANY_LINES);
      setAttribute(wires, "aria-label", wireWords(lines));
      redraw();
    },
  };
}

function cardKey(server) {
  return `${server.isHole ? "hole" : "server"} ${server.server_id}`;
}

function linesOf(attn, mlp) {
  return attn.flatMap((from) => mlp
    .filter((to) => !to.isHole || to.boot_id)
    .map((to) => ({
      from: cardKey(from),
      to: cardKey(to),
      fromName: from.server_id,
      toName: to.server_id,
      ...wireBetween(from, to),
    })));
}

function wireWords(lines) {
  if (!lines.length) return "No attention server is attached to an MLP server.";
  const words = { attached: "is attached to", lost: "has lost", apart: "is not attached to" };
  return `${lines.map((line) => `${line.fromName} ${words[line.kind]} ${line.toName}`).join("; ")}.`;
}

function drawWires(wires, lines, attn, mlp) {
  const origin = wires.getBoundingClientRect();
  if (!origin.width) return;
  const order = { apart: 0, attached: 1, lost: 2 };
  const sorted = [...lines].sort((one, other) => order[one.kind] - order[other.kind]);
  const nodes = sorted.flatMap((line) => {
    const [from, to] = [attn.get(line.from)?.node, mlp.get(line.to)?.node];
    return from && to ? wireNodes(line, from.getBoundingClientRect(), to.getBoundingClientRect(), origin) : [];
  });
  wires.replaceChildren(...nodes);
}

function wireNodes(line, from, to, origin) {
  const [x1, y1] = [from.right - origin.left, from.top - origin.top + endHeight(from)];
  const [x2, y2] = [to.left - origin.left, to.top - origin.top + endHeight(to)];
  const half = (x1 + x2) / 2;
  const path = draw("path", {
    class: line.kind, d: `M${x1} ${y1}C${half} ${y1} ${half} ${y2} ${x2} ${y2}`,
    "data-from": line.fromName, "data-to": line.toName,
  });
  if (line.kind === "attached") return [path, dot(x1, y1), dot(x2, y2)];
  if (line.kind === "lost") return [path, ...cross(half, (y1 + y2) / 2)];
  return [path];
}

/** Beside the name, also on the low cards of a large group. */
function endHeight(card) {
  return Math.min(WIRE_HEIGHT, card.height / 2);
}

function dot(x, y) {
  return draw("circle", { class: "end", cx: x, cy: y, r: 3.5 });
}

function cross(x, y) {
  return [
    draw("circle", { class: "under", cx: x, cy: y, r: 9 }),
    draw("path", { class: "cross", d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10` }),
  ];
}

function makeLegend() {
  const entry = (kind, words) => make("li", {},
    draw("svg", { class: "wires", "aria-hidden": "true", viewBox: "0 0 34 12" },
      draw("path", { class: kind, d: "M2 6H32" }),
      ...(kind === "attached" ? [dot(3.5, 6), dot(30.5, 6)] : []),
      ...(kind === "lost" ? [draw("circle", { class: "under", cx: 17, cy: 6, r: 6 }),
        draw("path", { class: "cross", d: "M13 2l8 8m0 -8l-8 8" })] : [])), words);
  return make("ul", { class: "legend", "aria-label": "Meaning of the lines" },
    entry("attached", "attached"), entry("lost", "lost"), entry("apart", "not attached"));
}
