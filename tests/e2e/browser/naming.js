// What a screen reader could not name: controls and tables without words, heads without scope, ids that are there twice.
() => {
  const found = [];
  const seen = new Set();
  for (const node of document.querySelectorAll("[id]")) {
    if (seen.has(node.id)) found.push(`two elements have the id ${node.id}`);
    seen.add(node.id);
  }
  for (const node of document.querySelectorAll("button, input, select, a[href], [role=img], [role=progressbar], [role=region], dialog[open]")) {
    if (!node.checkVisibility()) continue;
    const named = node.ariaLabel || node.labels?.length || node.textContent.trim() ||
      (node.getAttribute("aria-labelledby") ?? "").split(" ").some((id) => document.getElementById(id)?.textContent);
    if (!named) found.push(`no name: ${node.cloneNode(false).outerHTML.slice(0, 120)}`);
  }
  for (const node of document.querySelectorAll("table")) if (!node.caption?.textContent) found.push("a table without a caption");
  for (const node of document.querySelectorAll("th")) if (!node.scope) found.push(`a head without scope: ${node.textContent}`);
  return found;
}
