// What an answer of /afd/v1/groups says as a whole: totals, who is attached to whom, who is missing.

/** Every server of an answer. */
function allServers(answer) {
  return [...answer.groups.flatMap((group) => [...group.attn, ...group.mlp]), ...answer.unplaced];
}

function isNamed(server, name) {
  return name === server.server_id || name === server.boot_id;
}

/** How an attention server and an MLP server stand to each other: lost, attached or apart. */
function wireBetween(attn, mlp) {
  const loss = attn.lost.find(({ peer }) => isNamed(mlp, peer))
    ?? mlp.lost.find(({ peer }) => isNamed(attn, peer));
  if (loss) return { kind: "lost", reason: loss.reason };
  const isAttached = attn.attached.some((name) => isNamed(mlp, name))
    || mlp.attached.some((name) => isNamed(attn, name));
  return { kind: isAttached ? "attached" : "apart", reason: "" };
}

/** The attention side of a group's picture. */
function attnSide(group) {
  return group.attn.length ? group.attn : [hole("no attention server", "start one, so that requests are taken", [])];
}

/** The MLP side of a group's picture: its servers, then holes for ranks and peers not registered. */
function mlpSide(group, answer) {
  const known = allServers(answer);
  const sized = group.mlp.filter((server) => server.shard);
  const size = Math.max(0, ...sized.map((server) => server.shard.ep_size));
  const ranks = new Set(sized.map((server) => server.shard.ep_rank));
  const holes = [];
  for (let rank = 0; rank < size; rank += 1) {
    if (!ranks.has(rank)) holes.push(hole(`rank ${rank} of ${size}`, "no server has this rank", []));
  }
  const strangers = new Set(group.attn.flatMap((server) => server.attached)
    .filter((name) => !known.some((server) => isNamed(server, name))));
  for (const name of strangers) {
    holes.push(hole(name, "it never registered; attention servers say that they use it", [name]));
  }
  if (!group.mlp.length && !holes.length) {
    holes.push(hole("no MLP server", "start one, so that there are experts", []));
  }
  const byRank = [...group.mlp].sort((one, other) => rankOf(one) - rankOf(other));
  return [...byRank, ...holes];
}

function hole(name, reason, bootIds) {
  return { isHole: true, server_id: name, boot_id: bootIds[0] ?? "", standing: "absent", reason, lost: [], attached: [] };
}

function rankOf(server) {
  return server.shard ? server.shard.ep_rank : Infinity;
}

/** The numbers over all servers. */
function totals(answer) {
  const servers = allServers(answer);
  const attn = servers.filter((server) => server.role === "attn");
  const times = attn.map((server) => server.ttft_ms).filter((ms) => ms !== null);
  const uneven = servers.map((server) => server.load.expert_imbalance).filter((ratio) => ratio > 0);
  return {
    numReady: answer.groups.filter((group) => group.state === "ready").length,
    tokensPerS: sum(attn.map((server) => server.load.tokens_per_s)),
    numRunning: sum(attn.map((server) => server.load.num_running)),
    numWaiting: sum(attn.map((server) => server.load.num_waiting)),
    ttftMs: times.length ? sum(times) / times.length : null,
    slowestMs: times.length ? Math.max(...times) : null,
    imbalance: uneven.length ? Math.max(...uneven) : null,
  };
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}

/** What changed of states between two answers, in sentences. */
function newsBetween(before, now) {
  const stateOf = (answer) => new Map([
    ...answer.groups.map((group) => [`group ${group.name}`, [group.state, group.reason]]),
    ...allServers(answer).map((server) => [server.server_id, [server.standing, server.reason]]),
  ]);
  const earlier = stateOf(before);
  const later = stateOf(now);
  const news = [];
  for (const [name, [state, reason]] of later) {
    if (earlier.get(name)?.[0] !== state) {
      news.push(`${name} is ${lookOf(state).word}${reason ? `: ${reason}` : ""}`);
    }
  }
  for (const name of earlier.keys()) if (!later.has(name)) news.push(`${name} is gone`);
  return news;
}
