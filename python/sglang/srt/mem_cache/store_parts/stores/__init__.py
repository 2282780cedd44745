"""The storage backends of this release on the parts of a page: one mixin each on ``PartStore``."""
