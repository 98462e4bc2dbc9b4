"""Text out of trained models: many requests in one batch, which join and leave it at any token.

batcher = Batcher(stages, comm, tokenizer, context)
batcher.submit(tokenizer.encode("def "), Sampling(max_tokens=64), print)
batcher.stop(drain=True)
batcher.run()       # on rank 0; batcher.follow() on all others
"""
