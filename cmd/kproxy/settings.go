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

// The functions below make settings of the common types. at says which part of
// the configuration it is, and so what the default is.

func text(name string, usage string, at func(*config.Config) *string) setting {
	return setting{
		&cli.StringFlag{Name: name, Value: *at(&defaults), Usage: usage},
		func(c *cli.Context, cfg *config.Config) { *at(cfg) = c.String(name) },
	}
}

// words is text with a few values, which the configuration's Validate checks.
func words(name string, usage string, values []string, at func(*config.Config) *string) setting {
	s := text(name, usage+": "+strings.Join(values, ", "), at)
	if f, ok := s.flag.(*cli.StringFlag); ok {
		s.flag = choice{f, values}
	}
	return s
}

// texts may be given several times, or once with commas. A single empty value is
// none, as in kube-proxy: templates leave one.
func texts(name string, usage string, at func(*config.Config) *[]string) setting {
	return setting{
		&cli.StringSliceFlag{Name: name, Usage: usage},
		func(c *cli.Context, cfg *config.Config) {
			if *at(cfg) = c.StringSlice(name); slices.Equal(*at(cfg), []string{""}) {
				*at(cfg) = nil
			}
		},
	}
}

func number(name string, usage string, at func(*config.Config) *int) setting {
	return setting{
		&cli.IntFlag{Name: name, Value: *at(&defaults), Usage: usage},
		func(c *cli.Context, cfg *config.Config) { *at(cfg) = c.Int(name) },
	}
}

func decimal(name string, usage string, at func(*config.Config) *float64) setting {
	return setting{
		&cli.Float64Flag{Name: name, Value: *at(&defaults), Usage: usage},
		func(c *cli.Context, cfg *config.Config) { *at(cfg) = c.Float64(name) },
	}
}

func onOff(name string, usage string, at func(*config.Config) *bool) setting {
	return setting{
		&cli.BoolFlag{Name: name, Value: *at(&defaults), Usage: usage},
		func(c *cli.Context, cfg *config.Config) { *at(cfg) = c.Bool(name) },
	}
}

func length(name string, usage string, at func(*config.Config) *time.Duration) setting {
	return setting{
		&cli.DurationFlag{Name: name, Value: *at(&defaults), Usage: usage},
		func(c *cli.Context, cfg *config.Config) { *at(cfg) = c.Duration(name) },
	}
}

// standard has the help call something else the flag's default than the zero
// that stands for it.
func standard(what string, s setting) setting {
	switch f := s.flag.(type) {
	case *cli.IntFlag:
		f.DefaultText = what
	case *cli.DurationFlag:
		f.DefaultText = what
	case *cli.StringFlag:
		f.DefaultText = what
	}
	return s
}
