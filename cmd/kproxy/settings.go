package main

import (
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/config"
)

// setting is a flag of `kproxy run` and the part of the configuration that it
// sets. Flags that aren't given set nothing: what a file says stays.
type setting struct {
	flag cli.Flag
	set  func(*cli.Context, *config.Config)
}

// given applies the flags on the command line to cfg.
func given(c *cli.Context, settings []setting, cfg *config.Config) {
	for _, s := range settings {
		if s.isGiven(c) {
			s.set(c, cfg)
		}
	}
}

// isGiven reports whether the flag is on the command line, by any of its names.
func (s setting) isGiven(c *cli.Context) bool {
	return slices.ContainsFunc(s.flag.Names(), c.IsSet)
}

func flagsOf(settings []setting) []cli.Flag {
	out := make([]cli.Flag, len(settings))
	for i, s := range settings {
		out[i] = s.flag
	}
	return out
}

// defaults is where flags have from what their help calls their default.
var defaults = config.Default()

// set makes a setting of the type and default of the part of the configuration that the
// flag sets. A list may be given several times, or once with commas; a
// single empty value is none, as in kube-proxy: templates leave one.
func set(name, usage string) setting {
	s := setting{set: func(c *cli.Context, cfg *config.Config) {
		switch part := cfg.SetBy(name).(type) {
		case *string:
			*part = c.String(name)
		case *[]string:
			if *part = c.StringSlice(name); slices.Equal(*part, []string{""}) {
				*part = nil
			}
		case *int:
			*part = c.Int(name)
		case *float64:
			*part = c.Float64(name)
		case *bool:
			*part = c.Bool(name)
		case *time.Duration:
			*part = c.Duration(name)
		}
	}}
	s.flag = flagOf(name, defaults.SetBy(name), usage)
	return s
}

// flagOf makes a flag of the type that value points to. Lists have no default.
func flagOf(name string, value any, usage string) cli.Flag {
	switch v := value.(type) {
	case *string:
		return &cli.StringFlag{Name: name, Value: *v, Usage: usage}
	case *[]string:
		return &cli.StringSliceFlag{Name: name, Usage: usage}
	case *int:
		return &cli.IntFlag{Name: name, Value: *v, Usage: usage}
	case *float64:
		return &cli.Float64Flag{Name: name, Value: *v, Usage: usage}
	case *bool:
		return &cli.BoolFlag{Name: name, Value: *v, Usage: usage}
	case *time.Duration:
		return &cli.DurationFlag{Name: name, Value: *v, Usage: usage}
	}
	panic("no flag has this type")
}

// words is set with a few values, which the configuration's Validate checks.
func words(name, usage string, values []string) setting {
	s := set(name, usage+": "+strings.Join(values, ", "))
	if f, ok := s.flag.(*cli.StringFlag); ok {
		s.flag = choice{f, values}
	}
	return s
}

// standard has the help give what as the default, in place of the zero that stands for it.
func standard(what string, s setting) setting {
	switch f := s.flag.(type) {
	case *cli.IntFlag:
		f.DefaultText = what
	case *cli.DurationFlag:
		f.DefaultText = what
	}
	return s
}
