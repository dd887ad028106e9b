"""The workflow, the attempt, the lease keeper, launching, and the plugin that brings them to a Temporal worker."""
