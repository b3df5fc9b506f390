"""How right labels and confidences are, at which price."""
