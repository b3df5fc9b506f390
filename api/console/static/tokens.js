// Access tokens: who may call this service. Made here and shown once; revoked here.

import { byId, el, fill, icon, setText } from "./dom.js";
import { cell, head, row, table } from "./tables.js";
import { time } from "./words.js";

const MAY = { viewer: "reads budgets, jobs without names, the ledger", requester: "makes tasks, submits jobs, gets their labels", admin: "everything, also tokens and enrolment" };

export class Tokens {
  #api;
  #own;
  #onChange;
  #items = [];
  #asking = "";

  /** `own()` is the id of the token in use; `onChange(tokens)` hears of the list. */
  constructor(api, own, onChange) {
    this.#api = api;
    this.#own = own;
    this.#onChange = onChange;
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#make();
    });
    byId("token-copy").addEventListener("click", () => void this.#copy());
    byId("token-done").addEventListener("click", () => {
      byId("token-secret").textContent = "";
      byId("token-made").hidden = true;
      byId("token-name").focus();
    });
  }

  async refresh() {
    const items = [];
    let after = null;
    do {
      const page = await this.#api.tokens(after);
      items.push(...page.items);
      after = page.next;
    } while (after);
    this.#items = items;
    this.#onChange(items);
    this.#render();
  }

  async #make() {
    const name = byId("token-name").value.trim();
    setText(byId("token-error"), name ? "" : "Say for whom the token is: it is found again by that.");
    if (!name) {
      byId("token-name").focus();
      return;
    }
    try {
      const made = await this.#api.makeToken(name, byId("token-role").value);
      byId("token-name").value = "";
      byId("token-secret").textContent = made.token;
      setText(byId("token-made-words"), `The token ${made.name} (${made.role}). It is shown this once and kept nowhere: copy it now.`);
      setText(byId("token-copy"), "Copy");
      byId("token-made").hidden = false;
      byId("token-copy").focus();
      await this.refresh();
    } catch (error) {
      setText(byId("token-error"), error.message);
      byId("token-name").focus();
    }
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(byId("token-secret").textContent);
      setText(byId("token-copy"), "Copied");
    } catch {
      getSelection().selectAllChildren(byId("token-secret"));
      setText(byId("token-copy"), "Selected: copy it with your keyboard");
    }
  }

  async #revoke(token) {
    try {
      await this.#api.revokeToken(token.token_id);
      this.#asking = "";
      await this.refresh();
      setText(byId("token-error"), `${token.name} was revoked: it is refused from now on.`);
      byId("tokens-list").querySelector("button")?.focus();
    } catch (error) {
      setText(byId("token-error"), `It was not revoked: ${error.message}`);
    }
  }

  #ask(tokenId) {
    this.#asking = tokenId;
    this.#render();
    byId("tokens-list").querySelector(tokenId ? "button.yes" : "button")?.focus();
  }

  #render() {
    const place = byId("tokens-list");
    fill(place, JSON.stringify([this.#items, this.#asking]), () => {
      const { node, body } = table("Tokens, those in force first", [{ name: "Name" }, { name: "May" }, { name: "Made" }, { name: "Stop it" }], { hideCaption: true });
      const order = [...this.#items].sort((a, b) => Boolean(a.revoked_at) - Boolean(b.revoked_at) || b.created_at.localeCompare(a.created_at));
      body.append(...order.map((token) => this.#row(token)));
      return node;
    });
  }

  #row(token) {
    const isOwn = token.token_id === this.#own();
    const id = el("details", { class: "quiet" }, el("summary", {}, "Id", el("span", { class: "visually-hidden" }, ` of ${token.name}`)), el("span", { class: "mono" }, token.token_id));
    return row(
      head(token.name, isOwn ? el("span", { class: "small" }, " (this one)") : null, id),
      cell("May", "", el("strong", {}, token.role), el("span", { class: "small block" }, MAY[token.role] ?? "")),
      cell("Made", "", time(token.created_at), token.revoked_at ? el("span", { class: "block" }, icon("no", "calm"), " revoked ", time(token.revoked_at)) : null),
      cell("", "", token.revoked_at ? null : this.#offer(token, isOwn)),
    );
  }

  #offer(token, isOwn) {
    if (this.#asking !== token.token_id) {
      return el("button", { type: "button", class: "danger quiet", "aria-label": `Revoke ${token.name}`, onclick: () => this.#ask(token.token_id) }, "Revoke");
    }
    const means = isOwn ? "You will be signed out, and whoever uses it too." : "Whoever uses it is refused at once. What it made stays.";
    return el(
      "div",
      { role: "group", "aria-label": `Revoke ${token.name}?`, onkeydown: (event) => event.key === "Escape" && (event.preventDefault(), this.#ask("")) },
      el("p", { class: "small" }, means),
      el("div", { class: "buttons" }, el("button", { type: "button", class: "danger yes", onclick: () => void this.#revoke(token) }, "Yes, revoke it"), el("button", { type: "button", onclick: () => this.#ask("") }, "Keep it")),
    );
  }
}
