// Numbers, ages and states in words.

const LOOKS = {
  ready: { tone: "good", shape: "good", word: "ready" },
  serving: { tone: "good", shape: "good", word: "serving" },
  forming: { tone: "wait", shape: "wait", word: "forming" },
  wiring: { tone: "wait", shape: "wait", word: "wiring" },
  waiting: { tone: "wait", shape: "wait", word: "waiting" },
  degraded: { tone: "trouble", shape: "trouble", word: "degraded" },
  draining: { tone: "drain", shape: "drain", word: "draining" },
  dead: { tone: "dead", shape: "dead", word: "dead" },
  unplaced: { tone: "apart", shape: "apart", word: "in no group" },
  absent: { tone: "apart", shape: "apart", word: "not there" },
};

/** How a state is shown; one that this page does not know keeps its own word. */
function lookOf(state) {
  return Object.hasOwn(LOOKS, state) ? LOOKS[state] : { tone: "apart", shape: "apart", word: state };
}

/** 1234567 as 1.23M; small numbers keep what matters of their fraction. */
function short(number) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    const scale = unit === "k" ? 1e3 : size;
    if (number >= size) return `${(number / scale).toFixed(number / scale >= 100 ? 0 : 1)}${unit}`;
  }
  return Number.isInteger(number) || number >= 100 ? String(Math.round(number)) : number.toFixed(1);
}

function milliseconds(ms) {
  return ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${ms >= 10 ? Math.round(ms) : ms.toFixed(1)} ms`;
}

/** 75 as 1 min 15 s. */
function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const parts = [
    [Math.floor(whole / 86400), "d"],
    [Math.floor(whole / 3600) % 24, "h"],
    [Math.floor(whole / 60) % 60, "min"],
    [whole % 60, "s"],
  ];
  const first = parts.findIndex(([number]) => number > 0);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).filter(([number]) => number > 0)
    .map(([number, unit]) => `${number} ${unit}`).join(" ");
}

/** Short enough for a column of its own. */
function ago(seconds) {
  return seconds < 1 ? "now" : `${duration(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

function percent(part, whole) {
  return whole > 0 ? Math.min(100, Math.max(0, (100 * part) / whole)) : 0;
}

function counted(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}
