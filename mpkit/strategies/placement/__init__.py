"""Which rank holds what: stages, replicas and shards on their devices and nodes."""
