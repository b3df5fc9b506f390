// The ledger entry by entry: searchable, in either order, and as a file; what the summary by job is made of.

import { announce, byId, debounced, el, save, setText } from "./dom.js";
import { epsilonOf } from "./epsilon.js";
import { newest, oldest } from "./ledger_pages.js";
import { cell, empty, head, row, table } from "./tables.js";
import { accountName, count, levelName, short, time, whole, worth } from "./words.js";

const SHOWN = matchMedia("(max-width: 760px)").matches ? 10 : 25;
const KIND_WORDS = {
  open: "account opened",
  cap: "cap changed",
  reserve: "set aside",
  post: "made final",
  void: "given back",
  "write-off": "written off",
};

export class LedgerEntries {
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
    byId("ledger-entries").addEventListener("toggle", () => this.refresh().catch((error) => this.#fail(error)));
    byId("ledger-more").addEventListener("click", () => this.#more().catch((error) => this.#fail(error)));
    byId("ledger-download").addEventListener("click", () => this.#download().catch((error) => this.#fail(error)));
  }

  /** Shows what was written since, unless somebody is reading further down; reads nothing while it is folded away. */
  async refresh() {
    if (!byId("ledger-entries").open) return;
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
      this.#table = entriesTable("Ledger entries");
      this.#table.body.append(...entries.map((entry) => entryRow(entry, this.#budget)));
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
    const rows = entries.map((entry) => entryRow(entry, this.#budget));
    table.body.append(...rows);
    byId("ledger-more").hidden = go === null;
    announce(`${count(entries.length, "more entry", "more entries")}`);
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

/** A table of entries as they are kept: amounts in nano-units of mu squared, which add up, and their hashes. */
export function entriesTable(caption) {
  return table(`${caption}; amounts in nano-units of mu squared, which add up exactly`, [
    { name: "Number", num: true },
    { name: "When" },
    { name: "What" },
    { name: "Account" },
    { name: "Nano-units", num: true },
    { name: "Hash" },
  ]);
}

export function entryRow(entry, budget) {
  const at = budget.balance(entry.account, entry.level)?.delta ?? budget.view?.delta;
  const isCap = entry.kind === "open" || entry.kind === "cap";
  const unlimited = isCap && !entry.amount_nano && entry.detail?.cap === null;
  const means = unlimited ? "no limit" : at ? `${isCap ? "limit " : ""}${worth(epsilonOf(entry.amount_nano, at))}${isCap ? "" : " alone"}` : "";
  return row(
    head(whole(entry.seq)),
    cell("When", "", time(entry.at, { seconds: true })),
    cell("What", "", el("strong", { class: `kind ${entry.kind}` }, entry.kind), ` ${KIND_WORDS[entry.kind] ?? ""}`, entry.reservation_id ? el("span", { class: "small block mono" }, entry.reservation_id) : null),
    cell("Account", "", accountName(entry.account), el("span", { class: "small block" }, levelName(entry.level))),
    cell("Nano-units", "num", whole(entry.amount_nano), el("span", { class: "small block" }, means)),
    cell("Hash", "", el("span", { class: "mono hash" }, entry.hash)),
  );
}
