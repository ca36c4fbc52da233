package compare

// Name is what readers call a plane.
func (p Plane) Name() string {
	switch p {
	case Direct:
		return "direct routing"
	case IPVS:
		return "IPVS"
	}
	return string(p)
}
