/* The lines below a search result. Sphinx looks for the stem of a word ("rotari"), which often stands nowhere in the text, and reads
   the page from its buttons on; here the beginning of the word is looked for, in the article. */
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  Search.makeSearchSummary = (html, keywords, anchor) => {
    const article = new DOMParser().parseFromString(html, "text/html").querySelector("article");
    if (!article) return null;
    article.querySelectorAll(".headerlink, script, style, summary, mjx-container").forEach((element) => element.remove());
    article.querySelectorAll("dt, dd, p, li, td, th, h1, h2, h3, pre").forEach((element) => element.append(" "));
    const text = article.textContent.replace(/\s+/g, " ").trim();
    const lower = text.toLowerCase();
    const places = [...keywords].map((word) => {
      for (let length = word.length; length > 3 && length > word.length - 3; length--) {
        const place = lower.indexOf(word.slice(0, length).toLowerCase());
        if (place >= 0) return place;
      }
      return lower.indexOf(word.toLowerCase());
    });
    const start = Math.max(Math.min(...places.filter((place) => place >= 0), text.length) - 80, 0);
    const summary = document.createElement("p");
    summary.classList.add("context");
    const from = start < text.length - 80 ? start : 0;
    summary.textContent = (from ? "… " : "") + text.slice(from, from + 240).trim() + " …";
    return summary;
  };
});

/* What is folded is opened for printing, and folded again. */
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll(".bd-article details:not([open])")];
  opened.forEach((details) => details.setAttribute("open", ""));
});
addEventListener("afterprint", () => opened.forEach((details) => details.removeAttribute("open")));

/* Figures, formulas and printed tables that go on at the right fade out there, until one has scrolled to their end. */
addEventListener("load", () => {
  const boxes = document.querySelectorAll(".bd-article :is(.cell_output > a, .columns pre, .math)");
  const look = (box) => box.classList.toggle("goes-on", box.scrollLeft + box.clientWidth < box.scrollWidth - 8);
  const all = () => boxes.forEach(look);
  boxes.forEach((box) => box.addEventListener("scroll", () => look(box)));
  addEventListener("resize", all);
  window.MathJax?.startup?.promise.then(all);
  all();
});
