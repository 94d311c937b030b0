"""An L3 store of KV pages in the Mooncake store."""
