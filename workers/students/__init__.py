"""The student that is a network of its own; the others are feature_store.students, which a coordinator uses too."""
