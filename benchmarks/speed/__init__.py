"""Speed of the product, as ratios to the bare libraries."""
