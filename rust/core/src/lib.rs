//! The kvrelay scheduler: sans-IO decisions, KV accounting, policies, latency models, records and metrics.
