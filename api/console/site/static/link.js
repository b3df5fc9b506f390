// The way to the desk's server: the token comes from the address, leaves it at once, and stays in this tab.

const KEY = "labeler.desk";

function ownToken() {
  const told = new URLSearchParams(location.hash.slice(1)).get("token");
  try {
    if (told) sessionStorage.setItem(KEY, told);
  } catch {
    // storage may be forbidden; then a reload needs the whole address again
  }
  if (told) history.replaceState(null, "", location.pathname);
  try {
    return told ?? sessionStorage.getItem(KEY) ?? "";
  } catch {
    return told ?? "";
  }
}

let token = ownToken();
addEventListener("hashchange", () => {
  token = ownToken();
});

/** What the server said no with. */
export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

async function call(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, cache: "no-store", headers: { ...options.headers, Authorization: `Bearer ${token}` } });
  } catch {
    throw new Refused(0, "The desk does not answer: was it closed? Start it again with labeler agent desk, and open the address that it prints.");
  }
  if (answer.ok) return answer;
  let sentence = `the desk answered ${answer.status}`;
  try {
    sentence = String((await answer.json()).detail);
  } catch {
    // no sentence came with it
  }
  throw new Refused(answer.status, sentence);
}

/** Reads, or with a body sends, and gives back what the site is then. */
export async function ask(path, body) {
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  return (await call(path, sent)).json();
}

/** A file. */
export async function download(path) {
  return (await call(path, {})).blob();
}
