// The row of numbers at the top, each with its last minute.

const HISTORY_S = 60;
const SPARK_WIDTH = 120;
const SPARK_HEIGHT = 24;

/** One number; without a series it has no line. */
function makeTile({ name, title, hasLine }) {
  const number = make("span");
  const unit = make("span", { class: "unit" });
  const note = make("p", { class: "note" });
  const line = hasLine ? makeSparkline() : null;
  const node = make("li", { class: "tile", "data-tile": name },
    make("h2", {}, title), make("p", { class: "number" }, number, " ", unit), note);
  if (line) node.append(line.node);
  return {
    node,
    update(tile) {
      setText(number, tile.number);
      setText(unit, tile.unit);
      setText(note, tile.note);
      if (line) line.add(tile.at, tile.value, `${title} over the last minute`);
    },
  };
}

function makeSparkline() {
  const under = draw("path", { class: "under" });
  const path = draw("path");
  const node = draw("svg", {
    class: "spark", role: "img", viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, preserveAspectRatio: "none",
  }, draw("line", { x1: 0, x2: SPARK_WIDTH, y1: SPARK_HEIGHT, y2: SPARK_HEIGHT }), under, path);
  let points = [];
  return {
    node,
    add(at, value, name) {
      points = points.filter((point) => point.at > at - HISTORY_S);
      points.push({ at, value });
      const known = points.filter((point) => point.value !== null);
      const highest = Math.max(0, ...known.map((point) => point.value));
      setAttribute(path, "d", lineThrough(points, at, highest));
      setAttribute(under, "d", areaUnder(points, at, highest));
      setAttribute(node, "aria-label", known.length
        ? `${name}: from ${short(Math.min(...known.map((point) => point.value)))} to ${short(highest)}`
        : `${name}: nothing yet`);
    },
  };
}

function spot({ at, value }, now, highest) {
  const x = SPARK_WIDTH * (1 - (now - at) / HISTORY_S);
  const y = SPARK_HEIGHT * (1 - 0.92 * (highest > 0 ? value / highest : 0));
  return `${x.toFixed(1)} ${y.toFixed(1)}`;
}

/** Runs of known values as lines; a gap stays a gap. */
function runsOf(points) {
  const runs = [[]];
  for (const point of points) {
    if (point.value === null) runs.push([]);
    else runs.at(-1).push(point);
  }
  return runs.filter((run) => run.length > 0);
}

function lineThrough(points, now, highest) {
  return runsOf(points).map((run) => `M${run.map((point) => spot(point, now, highest)).join("L")}`).join("");
}

function areaUnder(points, now, highest) {
  return runsOf(points).map((run) => {
    const [first, last] = [run[0], run.at(-1)].map((point) => SPARK_WIDTH * (1 - (now - point.at) / HISTORY_S));
    const top = run.map((point) => spot(point, now, highest)).join("L");
    return `M${first.toFixed(1)} ${SPARK_HEIGHT}L${top}L${last.toFixed(1)} ${SPARK_HEIGHT}Z`;
  }).join("");
}

/** The tiles of an answer that came at `at` seconds. */
function tilesOf(answer, at) {
  const all = totals(answer);
  const router = answer.router;
  return [
    {
      name: "groups", title: "Groups ready", at, value: null,
      number: `${all.numReady} of ${answer.groups.length}`, unit: "",
      note: all.numReady ? "requests are served" : "no request can be served now",
    },
    {
      name: "requests", title: "Requests", hasLine: true, at, value: router.num_requests_in_flight,
      number: short(router.num_requests_in_flight), unit: "in this router",
      note: `${router.num_requests_waiting} held here; at servers ${all.numRunning} run, ${all.numWaiting} wait`,
    },
    {
      name: "tokens", title: "Tokens per second", hasLine: true, at, value: all.tokensPerS,
      number: short(all.tokensPerS), unit: "tokens/s", note: "all attention servers together",
    },
    {
      name: "ttft", title: "Time to first token", hasLine: true, at, value: all.ttftMs,
      number: all.ttftMs === null ? "\u2013" : milliseconds(all.ttftMs), unit: all.ttftMs === null ? "" : "mean",
      note: all.slowestMs === null ? "no request lately" : `slowest server ${milliseconds(all.slowestMs)}`,
    },
    {
      name: "imbalance", title: "Expert imbalance", hasLine: true, at, value: all.imbalance,
      number: all.imbalance === null ? "\u2013" : `${all.imbalance.toFixed(2)} \u00d7`,
      unit: all.imbalance === null ? "" : "the mean",
      note: all.imbalance === null ? "not known yet" : "rows of the busiest expert",
    },
  ];
}
