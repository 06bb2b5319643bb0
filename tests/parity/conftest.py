from training.conftest import base_config, cache, corpus, workers

__all__ = ["base_config", "cache", "corpus", "workers"]
