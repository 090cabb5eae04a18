// Not a module: it runs before the first paint, so that a chosen theme does not flash in.
document.documentElement.dataset.theme = localStorage.getItem("theme") ?? "";
