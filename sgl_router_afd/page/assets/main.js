// Asks the router every second, and says how old the picture is when no answer comes.

const GROUPS_PATH = "afd/v1/groups";
const VERSION = 1;
const EVERY_MS = 1000;
const TIMEOUT_MS = 5000;
const LATE_S = 3;

let current = null; // the last answer
let heardAt = null; // when it came, by performance.now()
let trouble = ""; // why the last request failed; "" if it did not
let isPaused = false;
let wantsKey = false;
let timer = null;
let isAsking = false;

const view = makeView();
const key = makeKey(() => { wantsKey = false; ask(); });

async function ask() {
  if (isAsking) return;
  isAsking = true;
  clearTimeout(timer);
  const startedAt = performance.now();
  try {
    const response = await fetch(GROUPS_PATH, {
      headers: key.headers(), cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    await take(response);
  } catch (error) {
    trouble = error.name === "TimeoutError" ? `no answer within ${TIMEOUT_MS / 1000} s` : "no connection";
  }
  isAsking = false;
  showLink();
  schedule(EVERY_MS - (performance.now() - startedAt));
}

async function take(response) {
  if (response.status === 401 || response.status === 403) {
    const detail = response.status === 403 ? await detailOf(response) : "";
    trouble = "";
    wantsKey = true;
    setHidden(byId("view"), true);
    key.ask(detail);
    return;
  }
  if (!response.ok) {
    trouble = `it answers ${response.status} for /${GROUPS_PATH}: ${await detailOf(response)}`;
    return;
  }
  try {
    show(await response.json());
    trouble = "";
  } catch (error) {
    trouble = error.name === "TimeoutError" ? "its answer broke off" : `its answer cannot be read: ${error.message}`;
  }
}

function show(answer) {
  if (answer.version !== VERSION) {
    throw new Error(`it has version ${answer.version}, this page knows ${VERSION}; load the page again`);
  }
  setHidden(byId("view"), false);
  key.accepted();
  view.update(answer, performance.now() / 1000);
  if (current) say(newsBetween(current, answer));
  current = answer;
  heardAt = performance.now();
}

/** For screen readers: what changed, and nothing every second. */
function say(news) {
  if (news.length) setText(byId("said"), news.slice(0, 5).join(". "));
}

/** The router's own words of an error, whatever shape they have. */
async function detailOf(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return String(body.error?.message ?? body.message ?? body.detail ?? text).slice(0, 500);
  } catch {
    return text.slice(0, 500);
  }
}

function schedule(delayMs) {
  clearTimeout(timer);
  if (isPaused || wantsKey || document.hidden) return;
  timer = setTimeout(ask, Math.max(50, delayMs));
}

function showLink() {
  const ageS = heardAt === null ? null : (performance.now() - heardAt) / 1000;
  const [link, shape, words] = linkOf(ageS);
  setAttribute(byId("link"), "data-link", link);
  setAttribute(document.body, "data-link", link);
  setAttribute(byId("link").querySelector("use"), "href", `#shape-${shape}`);
  setText(byId("link-text"), words);
  setHidden(byId("lost"), link !== "lost");
  if (link !== "lost") return;
  setText(byId("lost-what"), `The router cannot be reached: ${trouble || "no answer yet"}.`);
  setText(byId("lost-age"), ageS === null
    ? "Nothing has been heard of it yet. Trying on."
    : `This picture is ${duration(ageS)} old. Trying on.`);
}

function linkOf(ageS) {
  if (wantsKey) return ["asking", "wait", "waits for the admin key"];
  if (isPaused) return ["paused", "apart", ageS === null ? "paused" : `paused, ${duration(ageS)} old`];
  if (trouble) return ["lost", "trouble", ageS === null ? "not reached" : `lost, ${duration(ageS)} old`];
  if (ageS === null) return ["asking", "wait", "asking the router"];
  if (ageS > LATE_S) return ["asking", "wait", `answer is late, ${duration(ageS)} old`];
  return ["live", "good", "live, less than 3 s old"];
}

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  setAttribute(byId("pause"), "aria-pressed", String(isPaused));
  showLink();
  if (isPaused) clearTimeout(timer);
  else ask();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && !isPaused && !wantsKey) ask(); });
setInterval(showLink, 1000);
setText(byId("where"), location.host);
ask();
