"""Several processes that train one model: how they start, agree, share a batch, and what that costs in memory.

launch (start or join) -> ranks (agree) -> shares (of each batch) -> worst (one profile of all) -> gathered (bytes that
sharding adds) -> parallel (DDP, fully_shard)
"""
