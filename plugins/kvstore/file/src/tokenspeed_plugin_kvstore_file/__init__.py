"""An L3 store of KV pages in a local directory."""
