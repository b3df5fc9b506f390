"""Accuracy of labels and confidences, at a price."""
