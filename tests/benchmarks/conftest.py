"""Small real shards, as tests of workers have them."""

from tests.workers.conftest import make_shard

__all__ = ["make_shard"]
