// Agents and talliers: who is there, when they were last heard of, and whether enough are.

import { byId, el, fill, icon, keyed, setText } from "./dom.js";
import { cell, empty, head, row, table } from "./tables.js";
import { count, time, timeAgo } from "./words.js";

const SHOWN = 20;

export class Parties {
  #table = null;
  #view = null;
  #showAll = false;
  #quorum = el("p", { class: "verdict" });
  #more = el("button", {
    type: "button",
    onclick: () => {
      this.#showAll = true;
      this.show(this.#view);
    },
  });

  get view() {
    return this.#view;
  }

  show(view) {
    this.#view = view;
    const place = byId("parties-list");
    if (view.parties.length === 0) {
      this.#table = null;
      fill(place, "none", () =>
        empty("Nobody is enrolled yet. Make keys at each site, enrol the public keys with an administrator's token, then start the agent there:", "labeler keys --help\nlabeler agent --help\nlabeler tallier --help"),
      );
      return;
    }
    if (this.#table === null) {
      this.#table = table("Agents and talliers", [{ name: "Name" }, { name: "Last contact" }, { name: "More" }]);
      fill(place, "some", () => [this.#quorum, this.#table.node, el("p", { class: "more" }, this.#more)]);
    }
    this.#sayQuorum(view);
    const sorted = [...view.parties].sort(order);
    const shown = this.#showAll ? sorted : sorted.slice(0, SHOWN);
    this.#more.parentElement.hidden = shown.length === sorted.length;
    setText(this.#more, `Show all ${sorted.length}`);
    keyed(this.#table.body, shown, (party) => party.party_id, partyRow);
  }

  #sayQuorum(view) {
    const agents = view.parties.filter((party) => party.role === "agent" && party.state === "active").length;
    const words =
      `${view.live_agents} of ${count(agents, "agent")} and ${view.live_talliers} of ${count(view.talliers_needed, "tallier")} needed are there: ` +
      (view.has_quorum ? "enough to answer." : "not enough to answer, so jobs wait until more are back.");
    fill(this.#quorum, words, () => [icon(view.has_quorum ? "yes" : "alarm", view.has_quorum ? "good" : "low"), el("span", {}, words)]);
    this.#quorum.className = `verdict ${view.has_quorum ? "good-words" : "bad-words"}`;
  }
}

/** Those that are missing first, agents before talliers, the revoked last. */
function order(a, b) {
  return (
    (a.state === "revoked") - (b.state === "revoked") ||
    a.is_live - b.is_live ||
    a.role.localeCompare(b.role) ||
    (a.tallier ?? 0) - (b.tallier ?? 0) ||
    a.party_id.localeCompare(b.party_id, undefined, { numeric: true })
  );
}

function partyRow() {
  const name = el("span", { class: "name" });
  const role = el("span", { class: "small block" });
  const live = el("span", { class: "state" });
  const contact = el("span", { class: "small block" });
  const key = el("dd", { class: "mono" });
  const backbone = el("dd", { class: "mono" });
  const version = el("dd", {});
  const enrolled = el("dd", {});
  const fact = (words, value) => el("div", {}, el("dt", {}, words), value);
  const more = el(
    "details",
    { class: "quiet" },
    el("summary", {}, "Key, backbone, version"),
    el("dl", { class: "facts wide" }, fact("Key fingerprint: compare it with the one the site shows", key), fact("Backbone", backbone), fact("Version", version), fact("Enrolled", enrolled)),
  );
  const node = row(head(name, role), cell("Last contact", "", live, contact), cell("", "wide", more));
  return {
    node,
    update(party) {
      setText(name, party.party_id);
      setText(role, party.role === "tallier" ? `tallier ${party.tallier}` : "agent");
      const look = party.state === "revoked" ? ["no", "calm", "revoked"] : party.is_live ? ["yes", "good", "there"] : ["alarm", "low", "away"];
      fill(live, look[2], () => [icon(look[0], look[1]), ` ${look[2]}`]);
      fill(contact, String(party.last_contact), () => [party.last_contact ? timeAgo(party.last_contact) : "never heard of"]);
      setText(key, party.fingerprint);
      setText(backbone, party.backbone_fingerprint || "it has not said");
      setText(version, party.version || "it has not said");
      fill(enrolled, party.enrolled_at, () => [time(party.enrolled_at)]);
    },
  };
}
