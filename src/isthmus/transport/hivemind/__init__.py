"""The elastic engine without a master, over hivemind's DHT and libp2p."""
