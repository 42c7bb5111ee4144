"""The store of all versions of all objects, the feeds of their changes, and JSON values that are shared without
copies."""
