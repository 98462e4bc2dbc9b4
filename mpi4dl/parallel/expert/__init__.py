"""Expert parallelism: ranks have some of the experts each, and tokens travel to those that were chosen for them."""
