// The page from one answer of /afd/v1/groups.

const MAX_EVENTS_SHOWN = 100;

function makeView() {
  const tiles = makeList(byId("tiles"), makeTile);
  const groups = makeList(byId("groups"), makeGroup);
  const unplaced = makeList(byId("unplaced").querySelector("ul"), (server) => makeServer(server, "h3"));
  const unheard = makeList(byId("unheard").querySelector("ul"), makeUnheard);
  const events = makeList(byId("events").querySelector("ol"), makeEvent);
  writeFirstSteps();
  return {
    update(answer, at) {
      const { router } = answer;
      setText(byId("router"), [
        `up ${duration(router.up_s)}`,
        `policy ${router.policy}`,
        `data plane ${router.data_plane}`,
        router.ratio === null ? "no target ratio" : `ratio ${router.ratio}`,
        `version ${router.package_version}`,
      ].join(" \u00b7 "));
      tiles.update(tilesOf(answer, at), (tile) => tile.name);
      const isEmpty = !answer.groups.length && !answer.unplaced.length && !answer.unheard.length;
      setHidden(byId("empty"), !isEmpty);
      groups.update(answer.groups, (group) => group.name, answer);
      setHidden(byId("unplaced"), !answer.unplaced.length);
      unplaced.update(answer.unplaced, (server) => `${server.role} ${server.server_id}`, { answer, isCompact: false });
      setHidden(byId("unheard"), !answer.unheard.length);
      unheard.update(answer.unheard, (one) => one.url);
      setHidden(byId("events"), !answer.events.length);
      events.update(withKeys(answer.events.slice(0, MAX_EVENTS_SHOWN)), (event) => event.key);
      document.title = `${totals(answer).numReady}/${answer.groups.length} ready \u2013 sglang-afd router`;
    },
  };
}

function makeUnheard() {
  const url = make("code");
  const reason = make("span");
  const node = make("li", {}, url, " ", reason);
  return { node, update: (one) => { setText(url, one.url); setText(reason, one.reason); } };
}

function makeEvent() {
  const when = make("time");
  const text = make("span");
  const node = make("li", {}, when, text);
  return { node, update: (event) => { setText(when, ago(event.ago_s)); setText(text, event.text); } };
}

/** Events have no number; the n-th oldest of one text stays the n-th oldest while newer ones come. */
function withKeys(events) {
  const seen = new Map();
  return [...events].reverse().map((event) => {
    const nth = seen.get(event.text) ?? 0;
    seen.set(event.text, nth + 1);
    return { ...event, key: `${nth} ${event.text}` };
  }).reverse();
}

function writeFirstSteps() {
  const router = location.origin;
  const launch = "python -m sglang_afd.launch_server --model-path MODEL";
  setText(byId("start-mlp"), `${launch} --role mlp --port 30010 --afd-router ${router}`);
  setText(byId("start-attn"), `${launch} --role attn --port 30020 --afd-router ${router}`);
  setText(byId("ask"), `curl ${router}/v1/chat/completions -H 'Content-Type: application/json' \\\n`
    + `  -d '{"model": "MODEL", "messages": [{"role": "user", "content": "Hello"}]}'`);
}
