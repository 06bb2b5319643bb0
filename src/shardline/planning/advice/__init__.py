"""Which framework to train with and which runtime to serve with, for a goal: `shardline plan --goal`."""
