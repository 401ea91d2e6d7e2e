/* The lines below a search result. Sphinx looks for the stem of a word ("rotari"), which often stands nowhere in the text, and reads
   the page from its buttons on; here the beginning of the word is looked for, in the article. */
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  Search.makeSearchSummary = (html, keywords, anchor) => {
    const article = new DOMParser().parseFromString(html, "text/html").querySelector("article");
    if (!article) return null;
    article.querySelectorAll(".headerlink, script, style, mjx-container").forEach((element) => element.remove());
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
