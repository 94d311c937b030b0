"""The contracts a plugin implements, one short module each. ``API`` numbers live on the specs in ``tokenspeed.plugins``."""
