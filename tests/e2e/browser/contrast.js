// Every text that is seen and reads below WCAG AA, with the colours really painted: its own over all grounds below it.
() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const known = new Map();
  const parse = (color) => {
    if (!known.has(color)) known.set(color, painted(color));
    return known.get(color);
  };
  const painted = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const linear = (part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), holder = walker.currentNode.parentElement;
    if (!text || !holder.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
    const box = holder.getBoundingClientRect();
    if (box.width <= 1 || box.height <= 1 || holder.closest(".visually-hidden, .skip, option, :disabled, [aria-busy=true]")) continue;
    const grounds = [];
    for (let node = holder; node; node = node.parentElement) grounds.unshift(parse(getComputedStyle(node).backgroundColor));
    const ground = grounds.reduce((below, top) => over(top, below), [255, 255, 255, 1]);
    const style = getComputedStyle(holder), ink = over(parse(style.color), ground);
    const [low, high] = [light(ink), light(ground)].sort((a, b) => a - b);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (large ? 3 : 4.5)) found.push(`${ratio.toFixed(2)}: ${text.slice(0, 60)}`);
  }
  return found;
}
