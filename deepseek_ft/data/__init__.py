"""From a name or a path to blocks of tokens: `sources` reads documents, `blocks` tokenises and caches them."""
