package kube

import (
	"bytes"
	"fmt"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

type name = types.NamespacedName

// table holds the objects of one kind. A cache.Reflector writes into it, and so
// there is one copy of each object, and no queue between the watch and it, as a
// cache.SharedInformer has for many readers.
type table[T object] struct {
	mu      *sync.Mutex // guards everything below; tables that are read together share it
	fresh   func() T    // an empty object
	trim    func(T) T
	brief   func(T) T       // what changed reads of an object that comes: to unpack all at a start would take a while
	changed func(was, is T) // called with mu held; nil for one that isn't there

	objects map[name][]byte // packed, see collect
	synced  bool            // the API has said once what there is
}

// object is an object of the API.
type object interface {
	metav1.Object
	Marshal() ([]byte, error)
	Unmarshal([]byte) error
}

func newTable[T object](mu *sync.Mutex, fresh func() T, trim, brief func(T) T, changed func(was, is T)) *table[T] {
	return &table[T]{mu: mu, fresh: fresh, trim: trim, brief: brief, changed: changed, objects: map[name][]byte{}}
}

// Add takes an object that a watch says is new.
func (t *table[T]) Add(obj any) error { return t.Update(obj) }

// Update takes an object that a watch says has changed.
func (t *table[T]) Update(obj any) error {
	c, err := t.collect(obj)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.put(c)
	return nil
}

// put stores c and calls changed unless all that is kept of it was there.
func (t *table[T]) put(c *collected[T]) {
	before, had := t.objects[c.name]
	if had && bytes.Equal(before, c.message) {
		return
	}
	t.objects[c.name] = c.message
	var was T
	if had {
		was = t.unpack(before)
	}
	t.changed(was, c.brief)
}

// Delete forgets an object.
func (t *table[T]) Delete(obj any) error {
	o, ok := obj.(T)
	if !ok {
		return fmt.Errorf("forget an object of the API: it is a %T", obj)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.remove(nameOf(o))
	return nil
}

func (t *table[T]) remove(k name) {
	if was, had := t.get(k); had {
		delete(t.objects, k)
		var none T
		t.changed(was, none)
	}
}

// Replace takes everything there is, after a watch couldn't be resumed. What
// is the same as before is no change.
func (t *table[T]) Replace(list []any, _ string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	there := make(map[name]bool, len(list))
	for _, obj := range list {
		c, err := t.collect(obj)
		if err != nil {
			return err
		}
		there[c.name] = true
		t.put(c)
	}
	for k := range t.objects {
		if !there[k] {
			t.remove(k)
		}
	}
	if !t.synced {
		t.synced = true
		var none T
		t.changed(none, none)
	}
	return nil
}

// Resync does nothing: nothing is ever stale here.
func (t *table[T]) Resync() error { return nil }

// Transformer has a Reflector pack objects while it collects a list of them, so that
// they are never all in memory as they came.
func (t *table[T]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return t.collect(obj) }
}

func nameOf(o metav1.Object) name { return name{Namespace: o.GetNamespace(), Name: o.GetName()} }

// collected is an object on its way into a table.
type collected[T object] struct {
	name    name
	brief   T
	message []byte
}

// GetObjectMeta tells a Reflector the object's name.
func (c *collected[T]) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: c.name.Namespace, Name: c.name.Name}
}

// collect packs what is kept of an object of the API, unless that was done. A slice of ten
// endpoints takes half a kilobyte as a message of protobuf, and two and a half as structs with
// pointers, which the garbage collector follows one by one. To unpack one takes microseconds,
// and only those that change are.
func (t *table[T]) collect(obj any) (*collected[T], error) {
	if c, done := obj.(*collected[T]); done {
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
	return &collected[T]{nameOf(o), t.brief(o), message}, nil
}

// get unpacks an object. Who calls holds mu.
func (t *table[T]) get(k name) (o T, ok bool) {
	message, ok := t.objects[k]
	if !ok {
		return o, false
	}
	return t.unpack(message), true
}

func (t *table[T]) unpack(message []byte) T {
	o := t.fresh()
	if err := o.Unmarshal(message); err != nil {
		panic(fmt.Sprintf("kube: unpack what was packed: %v", err)) // a broken invariant
	}
	return o
}
