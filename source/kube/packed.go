package kube

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// packed is an object as a table keeps it. A slice of ten endpoints takes half a
// kilobyte as a message of protobuf, and two and a half as structs with pointers,
// which the garbage collector follows one by one. To unpack one takes microseconds,
// and only those that change are.
type packed struct {
	version string // resource version
	message []byte
}

// collected is an object on its way into a table.
type collected struct {
	name name
	packed
}

// GetObjectMeta is what a Reflector finds the object's name by.
func (c *collected) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: c.name.Namespace, Name: c.name.Name}
}

// collect packs an object of the API, unless that was done.
func (t *table[T]) collect(obj any) (*collected, error) {
	if c, done := obj.(*collected); done {
		return c, nil
	}
	o, ok := obj.(T)
	if !ok {
		return nil, fmt.Errorf("take an object of the API: it is a %T", obj)
	}
	o = t.trim(o)
	message, err := o.Marshal()
	if err != nil {
		return nil, fmt.Errorf("keep %s: %w", nameOf(o), err)
	}
	return &collected{nameOf(o), packed{o.GetResourceVersion(), message}}, nil
}

// get unpacks an object. Who calls holds mu.
func (t *table[T]) get(k name) (o T, ok bool) {
	p, ok := t.objects[k]
	if !ok {
		return o, false
	}
	return t.unpack(p), true
}

func (t *table[T]) unpack(p packed) T {
	o := t.fresh()
	if err := o.Unmarshal(p.message); err != nil {
		panic(fmt.Sprintf("kube: unpack what was packed: %v", err)) // a broken invariant
	}
	return o
}
