"""Numbers of speed: what the product takes beside the bare libraries."""
