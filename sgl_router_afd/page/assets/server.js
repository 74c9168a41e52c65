// One server as a card: state, reason, load, speed, and more on request.

function makeMeter(label, barClass = "") {
  const fill = make("span");
  const value = make("span", { class: "value" });
  const node = make("li", {}, make("span", { class: "label" }, label),
    make("span", { class: `bar ${barClass}`, "aria-hidden": "true" }, fill), value);
  return {
    node,
    update(part, text) {
      fill.style.width = `${part}%`;
      setText(value, text);
    },
  };
}

function makeSpeed(words) {
  const value = make("b");
  const node = make("span", {}, value, ` ${words}`);
  return { node, update: (text) => setText(value, text) };
}

/** A card; its role never changes. */
function makeServer(first, heading = "h4") {
  const name = make(heading, { class: "name" });
  const state = makeState();
  const why = make("p", { class: "why" });
  const load = first.isHole ? null : first.role === "attn" ? makeAttnLoad() : makeMlpLoad();
  const brief = make("span", { class: "brief" });
  const peers = make("p", { class: "peers" });
  const more = first.isHole ? null : makeMore();
  const node = make("li", { class: first.isHole ? "server ghost" : "server" },
    make("div", { class: "server-head" }, name, brief, state.node), why);
  if (load) node.append(...load.nodes, peers, more.node);
  return {
    node,
    update(server, { answer, isCompact }) {
      setText(name, server.server_id);
      state.update(server.standing);
      setAttribute(node, "data-tone", lookOf(server.standing).tone);
      setAttribute(node, "data-standing", server.standing);
      setAttribute(node, "data-server", server.server_id);
      node.classList.toggle("compact", isCompact && server.standing === "serving");
      setText(why, server.reason);
      setHidden(why, !server.reason);
      if (!load) return;
      load.update(server);
      setText(brief, server.role === "attn" ? `${server.load.num_running} running` : "");
      const words = peerWords(server, answer);
      setText(peers, words);
      setHidden(peers, !words);
      more.update(server);
    },
  };
}

function makeAttnLoad() {
  const meters = { running: makeMeter("running"), waiting: makeMeter("waiting"), kv: makeMeter("KV use") };
  const speeds = { tokens: makeSpeed("tokens/s"), first: makeSpeed("to first token") };
  return {
    nodes: [
      make("ul", { class: "meters" }, ...Object.values(meters).map((meter) => meter.node)),
      make("p", { class: "speeds" }, ...Object.values(speeds).map((speed) => speed.node)),
    ],
    update({ load, capacity, ttft_ms: ttft }) {
      const room = capacity.max_running_requests;
      meters.running.update(percent(load.num_running, room), `${short(load.num_running)} of ${short(room)}`);
      meters.waiting.update(percent(load.num_waiting, room), short(load.num_waiting));
      const part = percent(usedTokens({ load, capacity }), capacity.kv_tokens);
      meters.kv.update(part, `${Math.round(part)} %`);
      speeds.tokens.update(short(load.tokens_per_s));
      speeds.first.update(ttft === null ? "\u2013" : milliseconds(ttft));
    },
  };
}

function usedTokens({ load, capacity }) {
  return Math.max(0, capacity.kv_tokens - load.free_kv_tokens);
}

/** An even spread fills a quarter of the bar, four times the mean all of it. */
function makeMlpLoad() {
  const experts = make("p", { class: "speeds" });
  const meter = makeMeter("busiest", "mlp-bar");
  return {
    nodes: [experts, make("ul", { class: "meters" }, meter.node)],
    update({ load, shard }) {
      setText(experts, shard
        ? `experts ${shard.first_expert}\u2013${shard.stop_expert - 1}, rank ${shard.ep_rank} of ${shard.ep_size}`
        : "no experts yet");
      const ratio = load.expert_imbalance;
      meter.update(percent(ratio, 4), ratio > 0 ? `${ratio.toFixed(2)} \u00d7` : "not known");
    },
  };
}

function makeMore() {
  const list = make("dl", { class: "more" });
  const rows = makeList(list, () => {
    const term = make("dt");
    const value = make("dd");
    // A pair needs one node to be moved by; `display: contents` keeps it out of the grid.
    const node = make("div", { class: "pair" }, term, value);
    return { node, update: (row) => { setText(term, row[0]); setText(value, row[1]); } };
  });
  return {
    node: make("details", {}, make("summary", {}, "more"), list),
    update(server) {
      const requests = server.role === "attn"
        ? [
          ["KV tokens", `${usedTokens(server)} of ${server.capacity.kv_tokens} used`],
          ["requests", `${server.num_in_flight} here now, ${server.num_served} served, ${server.num_failed} failed`],
        ]
        : [];
      rows.update([
        ["address", server.url],
        ["models", server.models.join(", ") || "\u2013"],
        ...requests,
        ["heard", ago(server.last_heard_ago_s)],
        ["known by", server.is_static ? "the router's command line" : "its registration"],
        ["process", server.boot_id],
      ], (row) => row[0]);
    },
  };
}

/** Who it hears and who it lost, for everybody who does not see the lines. */
function peerWords(server, answer) {
  const known = allServers(answer);
  const named = (peer) => known.find((other) => isNamed(other, peer))?.server_id ?? peer;
  const sentences = [];
  if (server.attached.length) sentences.push(`attached to ${listed(server.attached.map(named))}`);
  for (const { peer, reason } of server.lost) sentences.push(`lost ${named(peer)}: ${reason}`);
  return sentences.join("; ");
}

function listed(names) {
  return names.length <= 8 ? names.join(", ") : `${names.slice(0, 8).join(", ")} and ${names.length - 8} more`;
}
