// Names in addresses, which need not be text.

export function decodeURIComponentSafely(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}
