// One page, several views: the address after # says which, so that every view can be linked to and gone back from.

import { byId, setText } from "./dom.js";

const VIEWS = ["overview", "jobs", "new", "sites", "ledger", "tokens"];
const TITLES = { overview: "Overview", jobs: "Jobs", new: "New job", sites: "Sites", ledger: "Ledger", tokens: "Tokens" };

export class Views {
  #shown = "";
  #onShow;

  /** `onShow(view, rest)` hears of every change; rest is what follows the view's name: #jobs/ID. */
  constructor(onShow) {
    this.#onShow = onShow;
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented || !this.rest) return;
      if (event.target.closest?.("input, select, textarea")) return;
      location.hash = `#${this.shown}`;
    });
  }

  get shown() {
    return this.#shown.split("/")[0] || "overview";
  }

  get rest() {
    return decodeURIComponent(this.#shown.split("/")[1] ?? "");
  }

  /** Shows what the address names; moves the focus to its heading where a reader went there. */
  follow({ isStart = false } = {}) {
    const [name, rest] = location.hash.slice(1).split("/");
    const view = VIEWS.includes(name) && !byId(`nav-${name}`).hidden ? name : "overview";
    const next = view === name && rest ? `${view}/${rest}` : view;
    if (next === this.#shown && !isStart) return;
    this.#shown = next;
    for (const one of VIEWS) {
      byId(one).hidden = one !== view;
      const link = byId(`nav-${one}`).firstElementChild;
      if (one === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.body.dataset.view = view;
    document.title = `${TITLES[view]} · Private labeling service`;
    this.#onShow(view, this.rest);
    if (!isStart) this.#focus(view);
  }

  #focus(view) {
    const heading = [...byId(view).querySelectorAll("h2")].find((one) => one.checkVisibility());
    heading?.setAttribute("tabindex", "-1");
    heading?.focus({ preventScroll: true });
    scrollTo(0, 0);
    setText(byId("announcer"), TITLES[view]);
  }
}
