// Before the page is drawn, so that a dark page never flashes white.
try {
  const theme = JSON.parse(localStorage.getItem("nanochat.settings"))?.theme;
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage, or not ours: the system's colours are right.
}
