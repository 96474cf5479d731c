// After the token: keep the key of this session, which only pages of this address can read, and leave the token's address.

localStorage.setItem("powertrain-key", document.documentElement.dataset.key);
const address = new URL(location.href);
address.searchParams.delete("token");
location.replace(address.href);
