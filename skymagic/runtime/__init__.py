"""What code on a rank calls: where it is, who prints, its shard. Standard library only."""
