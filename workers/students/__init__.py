"""The student that is a separate network; the others are feature_store.students, which a coordinator uses too."""
