"""Features and labels of images: shards, backbones, exact neighbors, students, and the files of a job."""
