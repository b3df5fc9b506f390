// The ledger: every charge, searchable, in either order, and as a file.

import { announce, byId, debounced, el, save, setText } from "./dom.js";
import { epsilonOf } from "./epsilon.js";
import { newest, oldest } from "./ledger_pages.js";
import { cell, empty, head, row, table } from "./tables.js";
import { accountName, count, epsilon, levelName, short, time, whole } from "./words.js";

const SHOWN = matchMedia("(max-width: 760px)").matches ? 10 : 25;
const KIND_WORDS = {
  open: "account opened",
  cap: "cap changed",
  reserve: "set aside",
  post: "made final",
  void: "given back",
  "write-off": "written off",
};

export class Ledger {
  #api;
  #budget;
  #onFailure;
  #table = null;
  #go = null;
  #shownHead = -1;
  #pages = 0;
  #running = null;

  constructor(api, budget, onFailure) {
    this.#api = api;
    this.#budget = budget;
    this.#onFailure = onFailure;
    byId("ledger-form").addEventListener("submit", (event) => event.preventDefault());
    byId("ledger-search").addEventListener("input", debounced(350, () => this.#restart()));
    for (const id of ["ledger-account", "ledger-kind", "ledger-order"]) byId(id).addEventListener("change", () => this.#restart());
    byId("ledger-more").addEventListener("click", () => this.#more().catch((error) => this.#fail(error)));
    byId("ledger-download").addEventListener("click", () => this.#download().catch((error) => this.#fail(error)));
  }

  /** Shows what was written since, unless somebody is reading further down. */
  async refresh() {
    const head = this.#budget.view?.head_seq ?? 0;
    this.#fillAccounts();
    if (head === this.#shownHead) return;
    if (this.#shownHead >= 0 && (this.#pages > 1 || byId("ledger-order").value === "oldest")) {
      setText(byId("ledger-words"), `${this.#headWords()} New entries were written; change the order or search to see them.`);
      return;
    }
    await this.#load();
  }

  #restart() {
    this.#load().catch((error) => this.#fail(error));
  }

  #fail(error) {
    if (error?.name !== "AbortError") this.#onFailure(error);
  }

  #filter() {
    const kind = byId("ledger-kind").value;
    return { account: byId("ledger-account").value, search: byId("ledger-search").value.trim(), keep: (entry) => kind === "" || entry.kind === kind };
  }

  #fillAccounts() {
    const select = byId("ledger-account");
    const names = this.#budget.accounts();
    if (select.options.length === names.length + 1) return;
    const chosen = select.value;
    select.replaceChildren(el("option", { value: "" }, "all"), ...names.map((name) => el("option", { value: name }, accountName(name))));
    select.value = names.includes(chosen) ? chosen : "";
  }

  async #page(signal) {
    const head = this.#budget.view?.head_seq ?? 0;
    if (byId("ledger-order").value === "newest") {
      const { entries, below } = await newest(this.#api, this.#go ?? head, SHOWN, this.#filter(), signal);
      return { entries, go: below > 0 ? below : null };
    }
    const { entries, above } = await oldest(this.#api, this.#go ?? 0, SHOWN, this.#filter(), signal);
    return { entries, go: above };
  }

  async #load() {
    this.#running?.abort();
    const running = new AbortController();
    this.#running = running;
    this.#go = null;
    const head = this.#budget.view?.head_seq ?? 0;
    const { entries, go } = await this.#page(running.signal);
    if (running.signal.aborted) return;
    this.#go = go;
    this.#pages = 1;
    this.#shownHead = head;
    const place = byId("ledger-list");
    if (entries.length === 0) {
      this.#table = null;
      const isSearch = byId("ledger-search").value || byId("ledger-account").value || byId("ledger-kind").value;
      place.replaceChildren(empty(isSearch ? "No entry matches. Search looks in account names, reservation ids and kinds." : "The ledger is empty: no account was opened yet. Enrol an agent, and its account opens here."));
    } else {
      this.#table = table("Ledger entries; amounts in nano-units of mu squared, which add up as epsilons do not", [
        { name: "Number", num: true },
        { name: "When" },
        { name: "What" },
        { name: "Account" },
        { name: "Amount", num: true },
        { name: "Spent after, epsilon", num: true },
        { name: "Hash" },
      ]);
      this.#table.body.append(...entries.map((entry) => this.#row(entry)));
      place.replaceChildren(this.#table.node);
    }
    byId("ledger-more").hidden = go === null;
    setText(byId("ledger-words"), this.#headWords());
  }

  #headWords() {
    const view = this.#budget.view;
    return view ? `${count(view.head_seq, "entry", "entries")}; the last hash is ${short(view.head_hash, 16)}` : "";
  }

  async #more() {
    if (this.#go === null || !this.#table) return;
    const table = this.#table;
    const { entries, go } = await this.#page(undefined);
    if (table !== this.#table) return;
    this.#go = go;
    this.#pages += 1;
    const rows = entries.map((entry) => this.#row(entry));
    table.body.append(...rows);
    byId("ledger-more").hidden = go === null;
    announce(`${count(entries.length, "more entry", "more entries")}`);
  }

  #row(entry) {
    const at = this.#budget.balance(entry.account, entry.level)?.delta ?? this.#budget.view?.delta;
    const inEpsilon = (nano) => (at ? epsilon(epsilonOf(nano, at)) : whole(nano));
    const isCap = entry.kind === "open" || entry.kind === "cap";
    const unlimited = isCap && (entry.amount_nano === 0 || entry.amount_nano === null) && entry.detail?.cap === null;
    const amount = unlimited ? "not limited" : isCap ? `cap epsilon ${inEpsilon(entry.amount_nano)}` : whole(entry.amount_nano);
    return row(
      head(whole(entry.seq)),
      cell("When", "", time(entry.at, { seconds: true })),
      cell("What", "", el("strong", { class: `kind ${entry.kind}` }, entry.kind), ` ${KIND_WORDS[entry.kind] ?? ""}`, entry.reservation_id ? el("span", { class: "small block mono" }, entry.reservation_id) : null),
      cell("Account", "", accountName(entry.account), el("span", { class: "small block" }, levelName(entry.level))),
      cell("Amount", "num", amount),
      cell("Spent after, epsilon", "num", entry.spent_after_nano === null ? "–" : inEpsilon(entry.spent_after_nano)),
      cell("Hash", "", el("span", { class: "mono", title: entry.hash }, short(entry.hash, 10))),
    );
  }

  async #download() {
    const button = byId("ledger-download");
    button.disabled = true;
    try {
      const lines = [];
      let after = 0;
      for (;;) {
        const { entries, above } = await oldest(this.#api, after, 500, this.#filter(), undefined);
        lines.push(...entries.map((entry) => `${JSON.stringify(entry)}\n`));
        setText(byId("ledger-words"), `Downloading: ${count(lines.length, "entry", "entries")} so far`);
        if (above === null) break;
        after = above;
      }
      save(new Blob(lines, { type: "application/x-ndjson" }), "ledger.jsonl");
      setText(byId("ledger-words"), `Downloaded ${count(lines.length, "entry", "entries")} as ledger.jsonl, oldest first`);
    } finally {
      button.disabled = false;
    }
  }
}
