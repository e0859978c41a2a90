"""What others would have computed: users of a prefix cache, and a re-prefill."""
